"""Pictures and tables. Reads what runs leave behind, never the runs themselves."""

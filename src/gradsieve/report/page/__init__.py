"""`gradsieve report`: one HTML page about one run, several, or a comparison. Reads run directories only."""

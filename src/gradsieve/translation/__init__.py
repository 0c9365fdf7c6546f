"""The paper's translation system: text files to sentences of pieces, in several languages, to English."""

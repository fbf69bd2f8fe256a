"""Configuration: parsing of files and options, help texts, ranges of fields and errors that name the remedy."""

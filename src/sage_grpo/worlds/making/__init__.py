"""How the worlds' models were made, from scratch on rendered clips. Nothing else needs this but the commands that make them again."""

"""One module per training framework; each imports its framework, and is imported only when it is used."""

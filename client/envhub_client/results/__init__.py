"""Arrays and infos as the trainer gets them."""

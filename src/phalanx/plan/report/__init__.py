"""What a plan says to people: words, pages, pictures."""

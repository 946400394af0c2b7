"""Present a plan to people in words, pages and pictures."""

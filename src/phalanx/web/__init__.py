"""The dashboard: a read-only HTTP API over run records, and the page that draws it."""

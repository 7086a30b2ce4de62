"""What one request went through, step by step: as data (`record`), and as a page that plays it (`page`)."""

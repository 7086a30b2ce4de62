"""What every recipe needs, and what a student reads. It imports nothing else of dinfer."""

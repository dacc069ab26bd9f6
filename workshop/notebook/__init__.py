"""What the lessons' notebooks call and show."""

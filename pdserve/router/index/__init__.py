"""What each worker already holds of a prompt, as its events tell it."""

"""Moving sealed frames between the engine's loop and the ranks."""

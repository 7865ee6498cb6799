"""What every backend and layout must hold, as tests and the models they compare with."""

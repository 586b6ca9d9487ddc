"""How a strategy serves the model it trains: the engine beside the trainer, and who has the device."""

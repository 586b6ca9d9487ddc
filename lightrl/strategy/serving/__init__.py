"""How a strategy serves the model that it trains: the engine beside the trainer, and who uses the device."""

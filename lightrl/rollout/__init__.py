"""Turns prompts into scored samples: engines generate, workflows run episodes, and rewards score them."""

"""Everything that a call runs through: recipe, attention, memory, decoding, streams. It knows no model and no policy
by name."""

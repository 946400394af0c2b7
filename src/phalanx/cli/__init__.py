"""The commands, kept thin. Heavy imports happen inside them, so that help answers at once."""

"""The control socket and the HTTP door: knows no other room, only the `Door` that app passes in."""

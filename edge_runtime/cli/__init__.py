"""The command line: parsing and printing only. Heavy parts are imported by the command that needs them."""

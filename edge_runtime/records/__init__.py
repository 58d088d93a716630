"""What two rooms exchange: slotted dataclasses on the frame's way, pydantic models for payloads."""

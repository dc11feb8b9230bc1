"""The node's side of disaggregation: who prefills a prompt, and how it comes to be decoded here."""

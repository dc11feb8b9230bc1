"""KV in and out of engines that schedule themselves, by way of staging blocks."""

"""What is learned and judged before deployment: simulated clients, adaptation rates, and which adapter to choose."""

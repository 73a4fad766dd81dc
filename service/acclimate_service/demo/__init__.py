"""`acclimate demo`: a service and eight clients of it, with a network and images that come along."""

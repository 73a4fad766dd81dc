"""FedTHE and FedTHE+: the ensemble of a global and a personal head, and how a client enrols."""

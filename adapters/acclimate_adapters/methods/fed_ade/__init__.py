"""Fed-ADE: the client's step, the risk that it descends, and the federated rounds."""

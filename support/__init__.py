"""What several suites, e2e and bench share: real servers, pods and deployments to test against, and oracles to compare with."""

"""What is reported about a deployment: conditions, status, and the problems that show nowhere else. Changes no object of it."""

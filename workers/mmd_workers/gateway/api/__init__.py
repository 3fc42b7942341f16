"""HTTP: routes, authentication, the life of a request (`endpoint`), and the answers to one request (`choices`).

Each API has a folder with the shape of its requests and answers. Knows neither the process nor how requests are placed.
"""

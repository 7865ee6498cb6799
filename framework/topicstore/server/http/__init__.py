"""The HTTP interface of a server: a Litestar application, which uvicorn serves in a separate thread."""

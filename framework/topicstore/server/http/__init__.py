"""The HTTP interface of a server: an ASGI application of Litestar, which uvicorn serves in a thread of its own."""

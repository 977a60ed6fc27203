"""Numbers -> pictures.

In: results of ``analytics``. Out: the Streamlit app, one page a file, and its figures.
Must not know: files, sockets, SQL.
"""

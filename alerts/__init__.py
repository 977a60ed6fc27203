"""SLOs and numbers -> decisions: Prometheus and Alertmanager files, breaker states, notifications.

Must not know: sockets, storage, pictures.
"""

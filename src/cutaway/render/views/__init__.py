"""Views: one module an experiment, each turning its typed results into a `Document`, in English or Chinese.

A view computes nothing that a reader could quote: numbers come from the result. Read next: `kv.py`.
"""

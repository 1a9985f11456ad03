"""The steps of a run: which are committed, what each says of itself, what is noted on it.

Who saves, keeps and deletes them is `dcp.manager`; who follows or averages them needs only this.
"""

"""What a manager deletes and when: retention rules, removal that no crash tears, leftovers of killed saves.

Which steps there are is known one folder up.
"""

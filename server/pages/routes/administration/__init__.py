"""Pages of those who run the service: keys and the audit log. Others are told what they lack."""

"""S3 as an object service: sessions, requests past botocore, and what its errors mean."""

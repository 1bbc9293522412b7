"""Object stores: multipart uploads and conditional puts."""

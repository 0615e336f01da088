"""From input size to a timeline of live bytes. Pure: numbers in, numbers out."""

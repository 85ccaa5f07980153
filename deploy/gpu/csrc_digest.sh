# What a native core is made of; sourced.

# Prints a digest of the native sources of the checkout $1: their names and contents.
csrc_digest() {
  (cd "$1/csrc" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1)
}

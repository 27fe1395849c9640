"""Machine code of the intrinsics: LLVM and inline PTX."""

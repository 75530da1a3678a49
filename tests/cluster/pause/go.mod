module quire.dev/tests/pause

go 1.25

package browser

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	_ "embed"
	"fmt"
	"io"
	"testing"
)

//go:embed axe/axe.min.js.gz
var axe []byte

// axeSum is the checksum of axe.min.js of axe-core 4.14.1: see axe/README.md.
const axeSum = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"

// Axe returns the script of axe-core, which checks the accessibility of a page.
func Axe(t *testing.T) string {
	t.Helper()
	unpacked, err := gzip.NewReader(bytes.NewReader(axe))
	if err != nil {
		t.Fatal(err)
	}
	script, err := io.ReadAll(unpacked)
	if err != nil {
		t.Fatal(err)
	}
	if sum := fmt.Sprintf("%x", sha256.Sum256(script)); sum != axeSum {
		t.Fatalf("test/browser/axe has the checksum %s, want %s", sum, axeSum)
	}
	return string(script)
}

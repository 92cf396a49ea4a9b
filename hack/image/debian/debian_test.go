package debian

import (
	"context"
	"io"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"spillway.dev/spillway/hack/image"
)

func TestParseURI(t *testing.T) {
	sum := strings.Repeat("ab", 32)
	got, err := parseURI("'http://host/debian/pool/main/g/gmp/libgmp10_6.2.1%2bdfsg1-1.1_arm64.deb' " +
		"libgmp10_2%3a6.2.1+dfsg1-1.1_arm64.deb 537920 SHA256:" + sum + "\n")
	want := Package{"libgmp10", "2:6.2.1+dfsg1-1.1", "pool/main/g/gmp/libgmp10_6.2.1%2bdfsg1-1.1_arm64.deb", sum}
	if err != nil || got != want {
		t.Errorf("got %+v, %v", got, err)
	}
	for _, bad := range []string{
		"",
		"'http://host/debian/pool/main/x_1_all.deb' x_1_all.deb 10 MD5Sum:00",
		"'http://host/debian/main/x_1_all.deb' x_1_all.deb 10 SHA256:" + sum,
		"'http://host/debian/pool/main/x.deb' x.deb 10 SHA256:" + sum,
	} {
		if p, err := parseURI(bad); err == nil {
			t.Errorf("%q is read as %+v", bad, p)
		}
	}
}

// A program of a package, with its libraries alone, and as an image.
func TestProgramsOfAPackage(t *testing.T) {
	ctx := context.Background()
	packages, err := Resolve(ctx, runtime.GOARCH, "netcat-openbsd")
	if err != nil {
		t.Fatal(err)
	}
	all, err := Tree(ctx, packages)
	if err != nil {
		t.Fatal(err)
	}
	files := image.NewTree()
	if err := files.AddPrograms(all, "/bin/nc.openbsd"); err != nil {
		t.Fatal(err)
	}
	names := files.Names()
	for _, want := range []string{"/usr/bin/nc.openbsd", "libc.so.6", "libbsd.so.0", "libmd.so.0", "ld-linux"} {
		if !slices.ContainsFunc(names, func(n string) bool { return strings.Contains(n, want) }) {
			t.Errorf("no %s among %q", want, names)
		}
	}
	if len(names) >= len(all.Names()) {
		t.Errorf("all %d files are there", len(names))
	}
	img, err := image.New(image.Config{}, runtime.GOARCH, files)
	if err != nil {
		t.Fatal(err)
	}
	contents := image.Contents(img)
	defer contents.Close()
	if n, err := io.Copy(io.Discard, contents); err != nil || n == 0 {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// Tests of two packages may resolve at once.
func TestTwoCanResolveAtOnce(t *testing.T) {
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() {
			if _, err := Resolve(context.Background(), runtime.GOARCH, "netbase"); err != nil {
				t.Error(err)
			}
		})
	}
	both.Wait()
}

func TestAWrongSumIsRefused(t *testing.T) {
	packages, err := Resolve(context.Background(), runtime.GOARCH, "netbase")
	if err != nil {
		t.Fatal(err)
	}
	p := packages[slices.IndexFunc(packages, func(p Package) bool { return p.Name == "netbase" })]
	p.SHA256 = strings.Repeat("0", 64)
	if _, err := Tree(context.Background(), []Package{p}); err == nil || !strings.Contains(err.Error(), "Hash Sum mismatch") {
		t.Errorf("got %v", err)
	}
}

package main

import (
	"io"
	"log"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"spillway.dev/spillway/hack/image"
)

func TestARegistryHasTheImageAndItsSBOM(t *testing.T) {
	server := httptest.NewServer(registry.New(registry.WithReferrersSupport(true), registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	files := image.NewTree()
	files.Write("/program", []byte("x"), 0o755)
	img, err := image.New(image.Config{}, "arm64", files)
	noError(t, err)
	sbom, err := image.Attach(img, image.Blob{Type: "application/vnd.cyclonedx+json", Data: []byte("{}")})
	noError(t, err)
	index, err := image.Index(nil, img)
	noError(t, err)
	dir := filepath.Join(t.TempDir(), "layout")
	noError(t, image.WriteLayout(dir, "spillway:1", index, sbom))

	to := strings.TrimPrefix(server.URL, "http://") + "/spillway:1"
	digest, err := push(dir, to)
	noError(t, err)
	pulled, err := remote.Index(digest)
	noError(t, err)
	want, _ := index.Digest()
	if got, err := pulled.Digest(); err != nil || got != want {
		t.Errorf("digest %s (%v), want %s", got, err, want)
	}
	of, err := img.Digest()
	noError(t, err)
	referrers, err := remote.Referrers(digest.Context().Digest(of.String()))
	noError(t, err)
	list, err := referrers.IndexManifest()
	noError(t, err)
	if len(list.Manifests) != 1 {
		t.Fatalf("referrers %+v", list.Manifests)
	}
	attached, err := remote.Image(digest.Context().Digest(list.Manifests[0].Digest.String()))
	noError(t, err)
	m, err := attached.Manifest()
	noError(t, err)
	if m.ArtifactType != "application/vnd.cyclonedx+json" || m.Subject.Digest != of {
		t.Errorf("attached is %+v", m)
	}
}

func TestANameWithoutATagIsRefused(t *testing.T) {
	if _, err := push(t.TempDir(), "example.com/spillway"); err == nil {
		t.Error("no error")
	}
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

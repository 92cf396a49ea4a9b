package faults

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// registry serves the blobs of an OCI layout, as containerd asks for them. It has no tags:
// images are named by their digests.
type registry struct{ layout string }

func (r registry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	digest := path.Base(req.URL.Path)
	blob := r.blob(digest)
	if blob == "" {
		return // /v2/: the API is there
	}
	text, err := os.ReadFile(blob)
	if err != nil {
		http.Error(w, `{"errors": [{"code": "MANIFEST_UNKNOWN"}]}`, http.StatusNotFound)
		return
	}
	kind := "application/octet-stream"
	if strings.Contains(req.URL.Path, "/manifests/") {
		var manifest descriptor
		if err := json.Unmarshal(text, &manifest); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		kind = manifest.MediaType
	}
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Docker-Content-Digest", digest)
	http.ServeFile(w, req, blob)
}

func (r registry) blob(digest string) string {
	hash, ok := strings.CutPrefix(digest, "sha256:")
	if !ok {
		return ""
	}
	return filepath.Join(r.layout, "blobs/sha256", hash)
}

// descriptor is what the test needs of an index, a manifest, and what they refer to.
type descriptor struct {
	MediaType, Digest string
	Platform          struct{ Architecture string }
	Manifests         []descriptor
}

// digests returns the digest of the layout's image, and of the part for one architecture.
func (r registry) digests(architecture string) (all, one string, err error) {
	var top, index descriptor
	if err := readJSON(filepath.Join(r.layout, "index.json"), &top); err != nil {
		return "", "", err
	}
	all = top.Manifests[0].Digest
	if err := readJSON(r.blob(all), &index); err != nil {
		return "", "", err
	}
	for _, m := range index.Manifests {
		if m.Platform.Architecture == architecture {
			return all, m.Digest, nil
		}
	}
	return "", "", fmt.Errorf("find image: %s has none for %s", r.layout, architecture)
}

func readJSON(file string, to any) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return json.Unmarshal(text, to)
}

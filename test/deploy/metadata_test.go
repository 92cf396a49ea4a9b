package deploy

import (
	"path"
	"path/filepath"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/engine"
	"sigs.k8s.io/yaml"
)

func TestTheChartSaysWhatArtifactHubAsks(t *testing.T) {
	m := load(t).Metadata
	if m.Home == "" || len(m.Sources) == 0 || len(m.Maintainers) == 0 || len(m.Keywords) == 0 ||
		!strings.HasPrefix(m.Icon, "data:image/svg+xml;base64,PHN2Zy") {
		t.Errorf("home %q, sources %q, maintainers %v, keywords %q, icon %.40q", m.Home, m.Sources, m.Maintainers, m.Keywords, m.Icon)
	}
	if m.Annotations["artifacthub.io/license"] != "Apache-2.0" || m.Annotations["artifacthub.io/category"] != "networking" {
		t.Errorf("annotations %v", m.Annotations)
	}
	annotation := func(name string) (list []struct {
		Kind, Version, Name, Image, Description, URL string
	}) {
		t.Helper()
		if err := yaml.Unmarshal([]byte(m.Annotations["artifacthub.io/"+name]), &list); err != nil || len(list) == 0 {
			t.Fatalf("annotation %s has %d elements: %v", name, len(list), err)
		}
		return list
	}
	if image := annotation("images")[0].Image; image != "spillway:"+version(t) {
		t.Errorf("the image is %s", image)
	}
	for _, change := range annotation("changes") {
		if !strings.Contains("added changed deprecated removed fixed security", change.Kind) || change.Description == "" {
			t.Errorf("change %+v", change)
		}
	}
	for _, link := range annotation("links") {
		if link.Name == "" || !strings.HasPrefix(link.URL, m.Home) {
			t.Errorf("link %+v", link)
		}
	}
	var crd struct {
		Metadata struct{ Name string }
		Spec     struct {
			Names    struct{ Kind string }
			Versions []struct{ Name string }
		}
	}
	crds := load(t).CRDObjects()
	if err := yaml.Unmarshal(crds[0].File.Data, &crd); err != nil {
		t.Fatal(err)
	}
	said := annotation("crds")
	if len(said) != len(crds) || said[0].Name != crd.Metadata.Name || said[0].Kind != crd.Spec.Names.Kind ||
		said[0].Version != crd.Spec.Versions[0].Name {
		t.Errorf("the annotation crds has %+v, the chart %+v", said, crd)
	}
}

func TestTheNotesVerifyTheInstall(t *testing.T) {
	notes := func(values map[string]any) string {
		t.Helper()
		c := load(t)
		all, err := util.ToRenderValues(c, values, common.ReleaseOptions{Name: "proxy", Namespace: "net"}, common.DefaultCapabilities)
		if err != nil {
			t.Fatal(err)
		}
		files, err := engine.Render(c, all)
		if err != nil {
			t.Fatal(err)
		}
		return files[path.Join(c.Name(), "templates", "NOTES.txt")]
	}
	for _, mode := range []string{"replace", "beside"} {
		text := notes(map[string]any{"mode": mode, "k8sServiceHost": "10.1.2.3"})
		for _, want := range []string{
			"\n  kubectl -n net rollout status daemonset/proxy\n",
			"\n  kubectl get events -A --field-selector reportingComponent=spillway.dev/agent\n",
			"\n  kubectl -n net exec daemonset/proxy -- spillway doctor",
			"\n  spillway status --all-nodes --agent-namespace net\n  spillway ui --all-nodes --agent-namespace net\n",
		} {
			if !strings.Contains(text, want) {
				t.Errorf("mode %s: the notes lack %q:\n%s", mode, want, text)
			}
		}
	}
	if text := notes(map[string]any{"k8sServiceHost": "10.1.2.3"}); !strings.Contains(text,
		"\nThe agents reach the API server at 10.1.2.3, port 6443. That must be no Service.\n") {
		t.Errorf("the notes lack the API server's address:\n%s", text)
	}
	if text := notes(map[string]any{"cleanup": true, "k8sServiceHost": "10.1.2.3"}); !strings.Contains(text, "helm -n net uninstall proxy") ||
		strings.Contains(text, "doctor") {
		t.Errorf("notes of a cleanup:\n%s", text)
	}
}

func TestHelmLintsTheChart(t *testing.T) {
	linter := lint.RunAll(filepath.Join(root, "deploy", "helm", "spillway"), map[string]any{"k8sServiceHost": "10.1.2.3"}, "kube-system")
	for _, m := range linter.Messages {
		t.Errorf("%s: %v", m.Path, m.Err)
	}
}

package kube

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// An error of a kubeconfig is one line that names the file, or the flag to give, and
// contains no secret.
func TestAKubeconfigThatCannotBeUsedSaysWhatToMend(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	dir := t.TempDir()
	const secret = "top-secret"
	cluster := "clusters: [{name: c, cluster: {server: 'https://192.0.2.1:6443'}}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\n"
	head := "apiVersion: v1\nkind: Config\n"
	for _, c := range []struct {
		name, text string // text "": there is no file
		says       []string
	}{
		{"no file", "", []string{"read kubeconfig: open ", "no file.yaml: no such file or directory: fix"}},
		{"no YAML", head + "users: {{" + secret, []string{"no YAML.yaml: yaml: "}},
		{"no text", "\n", []string{"no text.yaml: not a kubeconfig: fix"}},
		{"some word", "word", []string{"some word.yaml: not a kubeconfig: fix"}},
		{"another kind", "apiVersion: v1\nkind: Service\nmetadata: {name: a}\n", []string{"another kind.yaml: not a kubeconfig: fix"}},
		{"no cluster", head, []string{"read kubeconfig: it names no cluster: fix"}},
		{"a context of no name", head + cluster + "current-context: other\n", []string{"a context of no name.yaml", "other"}},
		{"a certificate without a key", head + cluster +
			"current-context: x\nusers: [{name: u, user: {client-certificate: /nonexistent/crt, token: " + secret + "}}]\n",
			[]string{"a certificate without a key.yaml", "/nonexistent/crt"}},
		{"no authority", strings.Replace(head+cluster, "6443'", "6443', certificate-authority: /nonexistent/ca", 1) +
			"current-context: x\nusers: [{name: u, user: {token: " + secret + "}}]\n",
			[]string{"no authority.yaml", "/nonexistent/ca"}},
		{"an address that is none", strings.Replace(head+cluster, "https://192.0.2.1:6443", "https://192.0.2.1:x", 1) +
			"current-context: x\nusers: [{name: u, user: {token: " + secret + "}}]\n",
			[]string{"an address that is none.yaml", "192.0.2.1:x"}},
	} {
		file := filepath.Join(dir, c.name+".yaml")
		if c.text != "" {
			if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		_, _, err := Connect(Access{Kubeconfig: file})
		if err == nil {
			t.Errorf("%s: is taken", c.name)
			continue
		}
		for _, word := range append(c.says, "fix --kubeconfig "+file) {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("%s: %q does not say %q", c.name, err, word)
			}
		}
		if strings.Contains(err.Error(), secret) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %q tells a secret, or is more than a line", c.name, err)
		}
	}
	for _, c := range []struct {
		access Access
		says   string
	}{
		{Access{}, "connect to API server: no kubeconfig given, and this is not a Pod of a cluster: set --kubeconfig FILE, or --manifests DIR"},
		{Access{Master: "https://192.0.2.1:x"}, "fix --master https://192.0.2.1:x"},
		{Access{Master: "https://me:" + secret + "@192.0.2.1:x"}, "write credentials to a kubeconfig"},
		{Access{Master: "https://192.0.2.1:x?token=" + secret}, "write credentials to a kubeconfig"},
	} {
		if _, _, err := Connect(c.access); err == nil || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), secret) {
			t.Errorf("%+v: %v does not say %q", c.access, err, c.says)
		}
	}
}

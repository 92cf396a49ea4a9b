package kube

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/await"
)

// kubeconfigText is a kubeconfig with a server, a certificate authority and a user.
func kubeconfigText(server, authority, user string) string {
	return "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: '" + server +
		"', certificate-authority: '" + authority + "'}}]\n" +
		"users: [{name: u, user: {" + user + "}}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n"
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestAChangeOfTheKubeconfigIsAProblem changes a kubeconfig in each way that programs use:
// by writing to it, by renaming a file over it, and by the links of a Secret's volume.
func TestAChangeOfTheKubeconfigIsAProblem(t *testing.T) {
	const first, second = "https://192.0.2.1:6443", "https://192.0.2.1:6444"
	dir := t.TempDir()
	ca, token := filepath.Join(dir, "ca"), filepath.Join(dir, "token")
	writeFile(t, ca, "one")
	writeFile(t, token, "one")
	user := "tokenFile: '" + token + "'"
	for name, replace := range map[string]func(t *testing.T, path, text string){
		"write": writeFile,
		"rename": func(t *testing.T, path, text string) {
			writeFile(t, path+".new", text)
			if err := os.Rename(path+".new", path); err != nil {
				t.Fatal(err)
			}
		},
		"link": func(t *testing.T, path, text string) {
			mount := filepath.Dir(path)
			data, err := os.MkdirTemp(mount, "..")
			if err != nil {
				t.Fatal(err)
			}
			writeFile(t, filepath.Join(data, filepath.Base(path)), text)
			next := filepath.Join(mount, "..data_tmp")
			if err := os.Symlink(filepath.Base(data), next); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(next, filepath.Join(mount, "..data")); err != nil {
				t.Fatal(err)
			}
			_ = os.Symlink(filepath.Join("..data", filepath.Base(path)), path) // the first time
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "config")
			replace(t, path, kubeconfigText(first, ca, user))
			f, err := newAccessFiles(Access{Kubeconfig: path})
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range []struct{ text, want string }{
				{kubeconfigText(first, ca, user) + "# the same\n", ""},
				{kubeconfigText(second, ca, user), "has another server than at the start of the agent"},
				{kubeconfigText(first, ca, user), ""},
				{kubeconfigText(second, ca, "token: abc"), "has another server and credentials than"},
				{kubeconfigText(first, ca, "client-certificate-data: YQ==, client-key-data: YQ=="), "has another credentials than"},
				{"kind: Servi", "fix --kubeconfig " + path},
				{kubeconfigText(first, ca, user), ""},
			} {
				replace(t, path, c.text)
				had := f.wrong
				if f.update(f.access.parts()); f.wrong != had {
					t.Errorf("%q counts after one read", c.text)
				}
				f.update(f.access.parts())
				switch {
				case c.want == "" && f.wrong != nil:
					t.Errorf("%q: problem %v", c.text, f.wrong)
				case c.want != "" && (f.wrong == nil || f.wrong.Where != "kubeconfig "+path || !strings.Contains(f.wrong.What, c.want)):
					t.Errorf("%q: problem %v, want %q", c.text, f.wrong, c.want)
				}
				if f.wrong != nil && strings.Contains(f.wrong.What, "abc") {
					t.Errorf("a secret: %v", f.wrong)
				}
			}
		})
	}
}

// TestFilesThatAKubeconfigNames changes the certificate authority, which clients keep, and
// the token, which client-go reads again.
func TestFilesThatAKubeconfigNames(t *testing.T) {
	dir := t.TempDir()
	ca, token, path := filepath.Join(dir, "ca"), filepath.Join(dir, "token"), filepath.Join(dir, "config")
	writeFile(t, ca, "one")
	writeFile(t, token, "one")
	writeFile(t, path, kubeconfigText("https://192.0.2.1:6443", ca, "tokenFile: '"+token+"'"))
	f, err := newAccessFiles(Access{Kubeconfig: path})
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, token, "two")
	f.update(f.access.parts())
	if f.update(f.access.parts()); f.wrong != nil {
		t.Errorf("a token that client-go reads again: %v", f.wrong)
	}
	writeFile(t, ca, "two")
	f.update(f.access.parts())
	if f.update(f.access.parts()); f.wrong == nil || !strings.Contains(f.wrong.What, "another certificate authority than") {
		t.Errorf("another authority: %v", f.wrong)
	}
}

// TestTheSourceReportsAChangeOfTheKubeconfig has a Source that runs.
func TestTheSourceReportsAChangeOfTheKubeconfig(t *testing.T) {
	before := accessPeriod
	accessPeriod = time.Millisecond
	t.Cleanup(func() { accessPeriod = before })
	path := filepath.Join(t.TempDir(), "config")
	server := without(t).Master
	access := Access{Kubeconfig: path}
	writeFile(t, path, kubeconfigText(server, "", "token: abc"))
	client, where, err := Connect(access)
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(Config{Client: client, Server: where, NodeName: "a", Access: &access})
	if err != nil {
		t.Fatal(err)
	}
	told, ended := make(chan []model.Problem, 1000), make(chan error, 1)
	running := t.Context()
	go func() {
		ended <- s.Run(running, func(_ model.Delta, ps []model.Problem) {
			if ps != nil {
				told <- ps
			}
		})
	}()
	t.Cleanup(func() { <-ended })
	for _, c := range []struct {
		server string
		want   bool
	}{{"https://192.0.2.1:6443", true}, {server, false}} {
		writeFile(t, path, kubeconfigText(c.server, "", "token: abc"))
		await.True(t, "a problem of the kubeconfig, or its end", func() bool {
			select {
			case ps := <-told:
				found := false
				for _, p := range ps {
					found = found || p.Where == "kubeconfig "+path && strings.Contains(p.What, "restart the agent")
				}
				return found == c.want
			default:
				return false
			}
		})
	}
}

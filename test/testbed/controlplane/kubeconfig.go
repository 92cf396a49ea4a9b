package controlplane

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"slices"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// writeKeys creates the authority and the keys of the programs.
func (c *ControlPlane) writeKeys() error {
	var err error
	if c.ca, err = newAuthority(); err != nil {
		return err
	}
	addrs := slices.Clone(c.addrs)
	for _, cidr := range c.cfg.ServiceCIDRs {
		addrs = append(addrs, cidr.Masked().Addr().Next()) // of the Service "kubernetes"
	}
	server, err := c.ca.server(addrs)
	if err != nil {
		return err
	}
	accounts, err := c.ca.client(User{Name: "service accounts"})
	if err != nil {
		return err
	}
	mine, err := c.ca.client(admin)
	if err != nil {
		return err
	}
	c.rest = &rest.Config{
		Host:            c.Server(),
		TLSClientConfig: rest.TLSClientConfig{CAData: c.ca.pem, CertData: mine.cert, KeyData: mine.key},
		ContentConfig:   rest.ContentConfig{ContentType: "application/vnd.kubernetes.protobuf"},
		UserAgent:       "spillway-lab",
		QPS:             -1,
		Dial:            c.dial,
	}
	return writeFiles(map[string][]byte{
		c.path("ca.crt"):        c.ca.pem,
		c.path("apiserver.crt"): server.cert,
		c.path("apiserver.key"): server.key,
		c.path("accounts.key"):  accounts.key,
	})
}

// AdminKubeconfig writes a kubeconfig with full privileges and returns its path.
func (c *ControlPlane) AdminKubeconfig() (string, error) { return c.Kubeconfig(admin) }

// Kubeconfig writes a kubeconfig for a user with a certificate, and returns its path.
// RBAC decides the user's rights.
func (c *ControlPlane) Kubeconfig(u User) (string, error) {
	id, err := c.ca.client(u)
	if err != nil {
		return "", err
	}
	return c.writeKubeconfig(c.Server(), &clientcmdapi.AuthInfo{ClientCertificateData: id.cert, ClientKeyData: id.key})
}

// KubeconfigAt is Kubeconfig for the API server at another address, such as a
// forwarder's; TLS still checks the certificate for the server's own name.
func (c *ControlPlane) KubeconfigAt(server string, u User) (string, error) {
	id, err := c.ca.client(u)
	if err != nil {
		return "", err
	}
	return c.writeKubeconfig(server, &clientcmdapi.AuthInfo{ClientCertificateData: id.cert, ClientKeyData: id.key})
}

// TokenKubeconfig writes a kubeconfig with a bearer token.
func (c *ControlPlane) TokenKubeconfig(token string) (string, error) {
	return c.writeKubeconfig(c.Server(), &clientcmdapi.AuthInfo{Token: token})
}

// StrangerKubeconfig writes a kubeconfig that trusts another authority than the API
// server's.
func (c *ControlPlane) StrangerKubeconfig() (string, error) {
	other, err := newAuthority()
	if err != nil {
		return "", err
	}
	return c.write(c.Server(), other.pem, &clientcmdapi.AuthInfo{Token: "none"})
}

func (c *ControlPlane) writeKubeconfig(server string, who *clientcmdapi.AuthInfo) (string, error) {
	return c.write(server, c.ca.pem, who)
}

func (c *ControlPlane) write(server string, authority []byte, who *clientcmdapi.AuthInfo) (string, error) {
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["lab"] = &clientcmdapi.Cluster{Server: server, TLSServerName: "localhost", CertificateAuthorityData: authority}
	cfg.AuthInfos["lab"] = who
	cfg.Contexts["lab"] = &clientcmdapi.Context{Cluster: "lab", AuthInfo: "lab"}
	cfg.CurrentContext = "lab"
	text, err := clientcmd.Write(*cfg)
	if err != nil {
		return "", fmt.Errorf("write kubeconfig: %w", err)
	}
	var unique [4]byte
	_, _ = rand.Read(unique[:])
	path := c.path("kubeconfig-" + hex.EncodeToString(unique[:]))
	return path, writeFiles(map[string][]byte{path: text})
}

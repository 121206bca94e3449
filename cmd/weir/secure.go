package main

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/credentials"
)

// secureFlags say how callers connect, and who of them may call what.
type secureFlags struct {
	TLSCertFile     string `name:"tls-cert-file" env:"WEIR_TLS_CERT_FILE" placeholder:"FILE" help:"Certificate (PEM, with its intermediate authorities) of the gRPC and HTTP ports, which then speak TLS only. Read again when it changes."`
	TLSKeyFile      string `name:"tls-key-file" env:"WEIR_TLS_KEY_FILE" placeholder:"FILE" help:"Its private key (PEM)."`
	TLSClientCAFile string `name:"tls-client-ca-file" env:"WEIR_TLS_CLIENT_CA_FILE" placeholder:"FILE" help:"Authorities (PEM) of clients: callers must have a certificate of theirs, for all but /healthz. Read again when it changes."`
}

// security is how the ports are served; its zero value is in clear text, for everybody.
type security struct {
	identity *identity // nil: clear text
}

func (c *secureFlags) security(ctx context.Context, log *slog.Logger, r prometheus.Registerer) (s security, err error) {
	switch {
	case c.TLSCertFile == "" && c.TLSKeyFile == "" && c.TLSClientCAFile == "":
		return s, nil
	case c.TLSCertFile == "" || c.TLSKeyFile == "":
		return s, errors.New("TLS needs --tls-cert-file and --tls-key-file: give both, or leave out all of TLS")
	}
	s.identity, err = newIdentity(ctx, c.TLSCertFile, c.TLSKeyFile, c.TLSClientCAFile, log, r)
	return s, err
}

// credentials are those of the gRPC port; nil: clear text.
func (s security) credentials() credentials.TransportCredentials {
	if s.identity == nil {
		return nil
	}
	return credentials.NewTLS(s.identity.config(tls.RequireAndVerifyClientCert, "h2"))
}

// wrap has the pages speak TLS.
func (s security) wrap(l listeners) listeners {
	if s.identity != nil {
		l.http = tls.NewListener(l.http, s.identity.config(tls.VerifyClientCertIfGiven, "http/1.1"))
	}
	return l
}
